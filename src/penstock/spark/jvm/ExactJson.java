package penstock.spark;

import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.time.DateTimeException;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.connector.catalog.functions.ScalarFunction;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.LongType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimestampType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A function of Spark SQL that parses a JSON object, given as UTF-8 in BINARY, into a struct.
 *
 * It returns null if the text is anything but one object with distinct names whose values have the JSON types of the
 * columns. The result for null must come from from_json and the checks of broken records, which are several times
 * slower: they decode the text to characters, and parse it twice. For all other texts the result is that of from_json,
 * which the tests compare. Null is also returned for what is valid but rare, such as escapes in names, so that this
 * class needs no second version of the rules for it.
 *
 * The schema's last field is always null: it is the field of from_json for corrupt records. A text without a value for
 * a field that is not nullable is null.
 */
public final class ExactJson implements ScalarFunction<InternalRow>, Serializable {
    private static final long serialVersionUID = 1L;
    private static final int LONGEST_TEXT = 16 << 20;
    private static final int LONGEST_NAME = 1000;
    private static final int DEEPEST = 64;
    private static final int MOST_UNKNOWN_NAMES = 64;

    private final StructType resultType;
    private final Columns columns;
    private final boolean isUtc;

    /** Creates the function for {@code schema}; {@code isUtc}: times without a zone are in UTC, otherwise refused. */
    ExactJson(StructType schema, boolean isUtc) {
        this.resultType = schema.asNullable();
        this.columns = new Columns(schema, schema.size() - 1);
        this.isUtc = isUtc;
    }

    @Override
    public DataType[] inputTypes() {
        return new DataType[] {DataTypes.BinaryType};
    }

    @Override
    public DataType resultType() {
        return resultType;
    }

    @Override
    public String name() {
        return "exact_json";
    }

    @Override
    public String canonicalName() {
        return "penstock.exact_json(" + resultType.json() + ", " + isUtc + ")";
    }

    /** Returns the struct for {@code text}, or null. Spark's generated code calls this method by its name. */
    public InternalRow invoke(byte[] text) {
        if (text == null || text.length > LONGEST_TEXT) {
            return null;
        }
        try {
            return new Text(text, isUtc).row(columns);
        } catch (Refused refused) {
            return null;
        }
    }

    /** The text is left to from_json. */
    private static final class Refused extends Exception {
        private static final long serialVersionUID = 1L;
        static final Refused REFUSED = new Refused();

        private Refused() {
            super(null, null, false, false);
        }
    }

    private enum Kind { STRING, BOOLEAN, BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, DATE, TIMESTAMP, STRUCT, ARRAY }

    /** A type of values: {@code columns} of a struct, {@code element} of an array. */
    private static final class Type implements Serializable {
        private static final long serialVersionUID = 1L;
        final Kind kind;
        final Columns columns;
        final Type element;

        Type(DataType type) {
            kind = kindOf(type);
            columns = type instanceof StructType struct ? new Columns(struct, struct.size()) : null;
            element = type instanceof ArrayType array ? new Type(array.elementType()) : null;
        }

        private static Kind kindOf(DataType type) {
            if (type instanceof StructType) {
                return Kind.STRUCT;
            }
            if (type instanceof ArrayType) {
                return Kind.ARRAY;
            }
            if (type instanceof BooleanType) {
                return Kind.BOOLEAN;
            }
            if (type instanceof ByteType) {
                return Kind.BYTE;
            }
            if (type instanceof ShortType) {
                return Kind.SHORT;
            }
            if (type instanceof IntegerType) {
                return Kind.INT;
            }
            if (type instanceof LongType) {
                return Kind.LONG;
            }
            if (type instanceof FloatType) {
                return Kind.FLOAT;
            }
            if (type instanceof DoubleType) {
                return Kind.DOUBLE;
            }
            if (type instanceof DateType) {
                return Kind.DATE;
            }
            if (type instanceof TimestampType) {
                return Kind.TIMESTAMP;
            }
            if (type instanceof StringType) {
                return Kind.STRING;
            }
            throw new IllegalArgumentException(type.simpleString() + " is not supported");
        }
    }

    /** The first {@code count} fields of a struct of {@code size} fields, by name. */
    private static final class Columns implements Serializable {
        private static final long serialVersionUID = 1L;
        final int size;
        final byte[][] names;
        final Type[] types;
        final boolean[] isRequired;
        private final Map<String, Integer> places = new HashMap<>();

        Columns(StructType schema, int count) {
            size = schema.size();
            names = new byte[count][];
            types = new Type[count];
            isRequired = new boolean[count];
            boolean isWhole = count == size;
            for (int place = 0; place < count; place++) {
                names[place] = schema.fields()[place].name().getBytes(StandardCharsets.UTF_8);
                types[place] = new Type(schema.fields()[place].dataType());
                isRequired[place] = !isWhole && !schema.fields()[place].nullable();
                places.put(schema.fields()[place].name(), place);
            }
        }

        /** Returns the place of the column with the name in {@code text}; -1 if there is none. */
        int find(byte[] text, int start, int end, int expected) {
            // Most records have the names in the order of the columns.
            if (expected < names.length && isName(expected, text, start, end)) {
                return expected;
            }
            Integer place = places.get(new String(text, start, end - start, StandardCharsets.UTF_8));
            return place == null ? -1 : place;
        }

        private boolean isName(int place, byte[] text, int start, int end) {
            return Arrays.equals(names[place], 0, names[place].length, text, start, end);
        }
    }

    /** A text and the place up to which it was read. */
    private static final class Text {
        private static final double[] POWERS = new double[23];

        static {
            for (int power = 0; power < POWERS.length; power++) {
                POWERS[power] = Double.parseDouble("1e" + power);
            }
        }

        private final byte[] text;
        private final boolean isUtc;
        private int place;
        private int depth;

        /** Names of open objects that are no columns: start and end of each. */
        private int[] unknown = new int[0];

        private int unknownCount;

        Text(byte[] text, boolean isUtc) {
            this.text = text;
            this.isUtc = isUtc;
        }

        /** Returns the row for the whole text. */
        InternalRow row(Columns columns) throws Refused {
            skipSpace();
            InternalRow row = object(columns);
            skipSpace();
            if (place != text.length || !isUtf8()) {
                throw Refused.REFUSED;
            }
            return row;
        }

        private boolean isUtf8() {
            for (byte each : text) {
                if (each < 0) {
                    return UTF8String.fromBytes(text).isValid();
                }
            }
            return true;
        }

        private void skipSpace() {
            while (place < text.length) {
                byte next = text[place];
                if (next != ' ' && next != '\n' && next != '\r' && next != '\t') {
                    return;
                }
                place++;
            }
        }

        private byte peek() throws Refused {
            if (place >= text.length) {
                throw Refused.REFUSED;
            }
            return text[place];
        }

        private void expect(char character) throws Refused {
            if (peek() != character) {
                throw Refused.REFUSED;
            }
            place++;
        }

        /** Reads {@code character} if it is next, after space. */
        private boolean accept(char character) throws Refused {
            skipSpace();
            if (peek() != character) {
                return false;
            }
            place++;
            return true;
        }

        private InternalRow object(Columns columns) throws Refused {
            begin('{');
            Object[] values = new Object[columns.size];
            boolean[] isSeen = new boolean[columns.names.length];
            int outer = unknownCount;
            int expected = 0;
            if (!accept('}')) {
                do {
                    skipSpace();
                    int start = place + 1;
                    int end = name();
                    int found = columns.find(text, start, end, expected);
                    if (found < 0) {
                        addUnknown(outer, start, end);
                        skip();
                    } else {
                        if (isSeen[found]) {
                            throw Refused.REFUSED;
                        }
                        isSeen[found] = true;
                        values[found] = value(columns.types[found]);
                        expected = found + 1;
                    }
                } while (accept(','));
                expect('}');
            }
            for (int each = 0; each < isSeen.length; each++) {
                if (columns.isRequired[each] && values[each] == null) {
                    throw Refused.REFUSED;
                }
            }
            unknownCount = outer;
            depth--;
            return new GenericInternalRow(values);
        }

        private void begin(char character) throws Refused {
            expect(character);
            if (++depth > DEEPEST) {
                throw Refused.REFUSED;
            }
        }

        /** Reads a name and the colon after it; returns the end of the name. Names with escapes are refused. */
        private int name() throws Refused {
            expect('"');
            int start = place;
            int end = endOfString();
            if (text[end] == '\\' || end - start > LONGEST_NAME) {
                throw Refused.REFUSED;
            }
            place = end + 1;
            if (!accept(':')) {
                throw Refused.REFUSED;
            }
            skipSpace();
            return end;
        }

        private void addUnknown(int outer, int start, int end) throws Refused {
            for (int each = outer; each < unknownCount; each++) {
                if (Arrays.equals(text, unknown[2 * each], unknown[2 * each + 1], text, start, end)) {
                    throw Refused.REFUSED;
                }
            }
            if (unknownCount == MOST_UNKNOWN_NAMES) {
                throw Refused.REFUSED;
            }
            if (unknown.length == 0) {
                unknown = new int[2 * MOST_UNKNOWN_NAMES];
            }
            unknown[2 * unknownCount] = start;
            unknown[2 * unknownCount + 1] = end;
            unknownCount++;
        }

        /** Returns the place of the next quote or backslash. */
        private int endOfString() throws Refused {
            for (int each = place; each < text.length; each++) {
                byte next = text[each];
                if (next == '"' || next == '\\') {
                    return each;
                }
                if (next >= 0 && next < ' ') {
                    throw Refused.REFUSED;
                }
            }
            throw Refused.REFUSED;
        }

        /** Reads a value of any type. */
        private void skip() throws Refused {
            switch (peek()) {
                case '"' -> string();
                case '{' -> skipObject();
                case '[' -> skipArray();
                case 't' -> word("true");
                case 'f' -> word("false");
                case 'n' -> word("null");
                default -> number();
            }
        }

        private void skipObject() throws Refused {
            begin('{');
            int outer = unknownCount;
            if (!accept('}')) {
                do {
                    skipSpace();
                    int start = place + 1;
                    addUnknown(outer, start, name());
                    skip();
                } while (accept(','));
                expect('}');
            }
            unknownCount = outer;
            depth--;
        }

        private void skipArray() throws Refused {
            begin('[');
            if (!accept(']')) {
                do {
                    skipSpace();
                    skip();
                } while (accept(','));
                expect(']');
            }
            depth--;
        }

        private void word(String word) throws Refused {
            for (int each = 0; each < word.length(); each++) {
                expect(word.charAt(each));
            }
        }

        private Object value(Type type) throws Refused {
            byte first = peek();
            if (first == 'n') {
                word("null");
                return null;
            }
            return switch (type.kind) {
                case STRING -> string();
                case BOOLEAN -> {
                    word(first == 't' ? "true" : "false");
                    yield first == 't';
                }
                case BYTE -> (byte) integer(Byte.MIN_VALUE, Byte.MAX_VALUE);
                case SHORT -> (short) integer(Short.MIN_VALUE, Short.MAX_VALUE);
                case INT -> (int) integer(Integer.MIN_VALUE, Integer.MAX_VALUE);
                case LONG -> integer(Long.MIN_VALUE, Long.MAX_VALUE);
                case FLOAT -> single();
                case DOUBLE -> fraction();
                case DATE -> date();
                case TIMESTAMP -> timestamp();
                case STRUCT -> object(type.columns);
                case ARRAY -> array(type.element);
            };
        }

        private GenericArrayData array(Type element) throws Refused {
            begin('[');
            List<Object> values = new ArrayList<>();
            if (!accept(']')) {
                do {
                    skipSpace();
                    values.add(value(element));
                } while (accept(','));
                expect(']');
            }
            depth--;
            return new GenericArrayData(values.toArray());
        }

        private UTF8String string() throws Refused {
            expect('"');
            int start = place;
            int end = endOfString();
            if (text[end] == '"') {
                place = end + 1;
                return UTF8String.fromBytes(text, start, end - start);
            }
            return stringWithEscapes(start, end);
        }

        private UTF8String stringWithEscapes(int start, int firstEscape) throws Refused {
            // No escape is shorter than the bytes of its character.
            byte[] made = new byte[endOfEscaped(firstEscape) - start];
            int count = firstEscape - start;
            System.arraycopy(text, start, made, 0, count);
            place = firstEscape;
            while (true) {
                int end = endOfString();
                System.arraycopy(text, place, made, count, end - place);
                count += end - place;
                place = end + 1;
                if (text[end] == '"') {
                    return UTF8String.fromBytes(made, 0, count);
                }
                byte kind = peek();
                place++;
                switch (kind) {
                    case '"', '\\', '/' -> made[count++] = kind;
                    case 'b' -> made[count++] = '\b';
                    case 'f' -> made[count++] = '\f';
                    case 'n' -> made[count++] = '\n';
                    case 'r' -> made[count++] = '\r';
                    case 't' -> made[count++] = '\t';
                    case 'u' -> count = putCharacter(made, count);
                    default -> throw Refused.REFUSED;
                }
            }
        }

        /** Returns the place of the quote that ends the string with an escape at {@code escape}. */
        private int endOfEscaped(int escape) throws Refused {
            int end = escape;
            while (text[end] == '\\') {
                place = end + 1;
                peek();
                place++;
                end = endOfString();
            }
            return end;
        }

        private int putCharacter(byte[] made, int start) throws Refused {
            int character = unit();
            if (character >= Character.MIN_SURROGATE && character <= Character.MAX_SURROGATE) {
                expect('\\');
                expect('u');
                int second = unit();
                if (!Character.isSurrogatePair((char) character, (char) second)) {
                    throw Refused.REFUSED;
                }
                character = Character.toCodePoint((char) character, (char) second);
            }
            byte[] encoded = Character.toString(character).getBytes(StandardCharsets.UTF_8);
            System.arraycopy(encoded, 0, made, start, encoded.length);
            return start + encoded.length;
        }

        private int unit() throws Refused {
            int unit = 0;
            for (int each = 0; each < 4; each++) {
                byte next = peek();
                int digit = next < 0 ? -1 : Character.digit(next, 16);
                if (digit < 0) {
                    throw Refused.REFUSED;
                }
                unit = 16 * unit + digit;
                place++;
            }
            return unit;
        }

        private long mantissa;
        private int digits;
        private int decimals;
        private boolean isNegative;
        private boolean hasFraction;
        private boolean hasExponent;

        /** Reads a number; {@code mantissa} has its digits if there are at most 18. */
        private void number() throws Refused {
            mantissa = 0;
            digits = decimals = 0;
            hasFraction = hasExponent = false;
            isNegative = peek() == '-';
            if (isNegative) {
                place++;
            }
            boolean isZero = peek() == '0';
            digits();
            if (isZero && digits > 1) {
                throw Refused.REFUSED;
            }
            if (isNext('.')) {
                hasFraction = true;
                int before = digits;
                digits();
                decimals = digits - before;
            }
            if (isNext('e') || isNext('E')) {
                hasExponent = true;
                if (!isNext('+')) {
                    isNext('-');
                }
                digits();
            }
            if (digits > 100) {
                throw Refused.REFUSED;
            }
        }

        private boolean isNext(char character) {
            if (place < text.length && text[place] == character) {
                place++;
                return true;
            }
            return false;
        }

        private void digits() throws Refused {
            int start = place;
            while (place < text.length && text[place] >= '0' && text[place] <= '9') {
                mantissa = 10 * mantissa + (text[place] - '0');
                place++;
            }
            if (place == start) {
                throw Refused.REFUSED;
            }
            digits += place - start;
        }

        private long integer(long least, long greatest) throws Refused {
            number();
            long number = isNegative ? -mantissa : mantissa;
            boolean isRare = hasFraction || hasExponent || digits > 18 || isNegative && number == 0;
            if (isRare || number < least || number > greatest) {
                throw Refused.REFUSED;
            }
            return number;
        }

        private double fraction() throws Refused {
            int start = place;
            number();
            if (!hasFraction && !hasExponent && (digits > 18 || isNegative && mantissa == 0)) {
                throw Refused.REFUSED;
            }
            double number;
            if (!hasExponent && digits <= 15) {
                // Both are exact, so the quotient is the nearest number.
                number = mantissa / POWERS[decimals];
                number = isNegative ? -number : number;
            } else {
                number = Double.parseDouble(new String(text, start, place - start, StandardCharsets.ISO_8859_1));
            }
            if (Double.isInfinite(number)) {
                throw Refused.REFUSED;
            }
            return number;
        }

        private float single() throws Refused {
            int start = place;
            number();
            if (!hasFraction && !hasExponent && (digits > 7 || isNegative && mantissa == 0)) {
                throw Refused.REFUSED;
            }
            float number = Float.parseFloat(new String(text, start, place - start, StandardCharsets.ISO_8859_1));
            if (Float.isInfinite(number)) {
                throw Refused.REFUSED;
            }
            return number;
        }

        /** Reads {@code count} digits. */
        private int digits(int count) throws Refused {
            int number = 0;
            for (int each = 0; each < count; each++) {
                int digit = peek() - '0';
                if (digit < 0 || digit > 9) {
                    throw Refused.REFUSED;
                }
                number = 10 * number + digit;
                place++;
            }
            return number;
        }

        /** Reads YYYY-MM-DD; returns the days since 1970. */
        private int day() throws Refused {
            int year = digits(4);
            if (year == 0) {
                throw Refused.REFUSED;
            }
            expect('-');
            int month = digits(2);
            expect('-');
            try {
                return Math.toIntExact(LocalDate.of(year, month, digits(2)).toEpochDay());
            } catch (DateTimeException error) {
                throw Refused.REFUSED;
            }
        }

        private int date() throws Refused {
            expect('"');
            int day = day();
            expect('"');
            return day;
        }

        /** Reads YYYY-MM-DDThh:mm:ss[.f][zone], zone Z or +hh:mm; returns the microseconds since 1970. */
        private long timestamp() throws Refused {
            expect('"');
            long day = day();
            if (!isNext('T')) {
                expect(' ');
            }
            int hour = digits(2);
            expect(':');
            int minute = digits(2);
            expect(':');
            int second = digits(2);
            int micros = 0;
            if (isNext('.')) {
                int unit = 100_000;
                while (peek() >= '0' && peek() <= '9') {
                    if (unit == 0) {
                        throw Refused.REFUSED;
                    }
                    micros += unit * digits(1);
                    unit /= 10;
                }
                if (unit == 100_000) {
                    throw Refused.REFUSED;
                }
            }
            if (hour > 23 || minute > 59 || second > 59) {
                throw Refused.REFUSED;
            }
            long seconds = 86_400 * day + 3_600 * hour + 60 * minute + second - zone();
            expect('"');
            return 1_000_000 * seconds + micros;
        }

        /** Reads the zone of a time; returns its seconds before UTC. */
        private int zone() throws Refused {
            byte sign = peek();
            if (sign == '"' && isUtc || isNext('Z')) {
                return 0;
            }
            if (sign != '+' && sign != '-') {
                throw Refused.REFUSED;
            }
            place++;
            int hours = digits(2);
            expect(':');
            int minutes = digits(2);
            if (hours > 14 || minutes > 59) {
                throw Refused.REFUSED;
            }
            return (sign == '-' ? -1 : 1) * (3_600 * hours + 60 * minutes);
        }
    }
}
