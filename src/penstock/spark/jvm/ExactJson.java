package penstock.spark;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadConstraints;
import java.io.IOException;
import java.io.Serializable;
import java.time.DateTimeException;
import java.time.LocalDate;
import java.util.ArrayList;
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
 * which the tests compare. Null is also returned for what is valid but rare, such as times without seconds, so that
 * this class needs no second version of the rules for it.
 *
 * With {@code isClosed}, null is also returned for an object with a name that is no column.
 *
 * The schema's last field is always null: it is the field of from_json for corrupt records. A text without a value for
 * a field that is not nullable is null.
 */
public final class ExactJson implements ScalarFunction<InternalRow>, Serializable {
    private static final long serialVersionUID = 1L;
    private static final int LONGEST_TEXT = 16 << 20;
    private static final int MOST_UNKNOWN_NAMES = 64;
    private static final int MOST_EXACT_FLOAT = 1 << 24;
    private static final JsonFactory FACTORY = JsonFactory.builder()
        .streamReadConstraints(StreamReadConstraints.builder().maxNestingDepth(64).maxNumberLength(100).build())
        .build();

    private final StructType resultType;
    private final Columns columns;
    private final boolean isUtc;
    private final boolean isClosed;

    /** Creates the function for {@code schema}; {@code isUtc}: times without a zone are in UTC, otherwise refused. */
    ExactJson(StructType schema, boolean isUtc, boolean isClosed) {
        this.resultType = schema.asNullable();
        this.columns = new Columns(schema, schema.size() - 1);
        this.isUtc = isUtc;
        this.isClosed = isClosed;
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
        return "penstock.exact_json(" + resultType.json() + ", " + isUtc + ", " + isClosed + ")";
    }

    /** Returns the struct for {@code text}, or null. Spark's generated code calls this method by its name. */
    public InternalRow invoke(byte[] text) {
        if (text == null || text.length > LONGEST_TEXT || StrictJson.isDetectedEncoding(text) || !isUtf8(text)) {
            return null;
        }
        try (JsonParser tokens = FACTORY.createParser(text)) {
            Columns closed = isClosed ? columns : null;
            return new Reader(tokens, StrictJson.hasEscapedUnits(text), isUtc, closed).row(columns);
        } catch (Refused | IOException invalid) {
            return null;
        }
    }

    private static boolean isUtf8(byte[] text) {
        for (byte each : text) {
            if (each < 0) {
                return UTF8String.fromBytes(text).isValid();
            }
        }
        return true;
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
        final String[] names;
        final Type[] types;
        final boolean[] isRequired;
        private final Map<String, Integer> places = new HashMap<>();

        Columns(StructType schema, int count) {
            size = schema.size();
            names = new String[count];
            types = new Type[count];
            isRequired = new boolean[count];
            boolean isWhole = count == size;
            for (int place = 0; place < count; place++) {
                names[place] = schema.fields()[place].name();
                types[place] = new Type(schema.fields()[place].dataType());
                isRequired[place] = !isWhole && !schema.fields()[place].nullable();
                places.put(names[place], place);
            }
        }

        /** Returns the place of the column {@code name}; -1 if there is none. */
        int find(String name, int expected) {
            // Most records have the names in the order of the columns.
            if (expected < names.length && names[expected].equals(name)) {
                return expected;
            }
            Integer place = places.get(name);
            return place == null ? -1 : place;
        }
    }

    /** Reads the tokens of a text. The methods that read a value begin at its first token and end at its last one. */
    private static final class Reader {
        private final JsonParser tokens;
        private final boolean hasEscapedUnits;
        private final boolean isUtc;

        /** The columns of an object that may have no other names; null: all objects may. */
        private final Columns closed;

        /** Names of the open objects that are no columns. */
        private final List<String> unknown = new ArrayList<>();

        Reader(JsonParser tokens, boolean hasEscapedUnits, boolean isUtc, Columns closed) {
            this.tokens = tokens;
            this.hasEscapedUnits = hasEscapedUnits;
            this.isUtc = isUtc;
            this.closed = closed;
        }

        /** Returns the row for the whole text. */
        InternalRow row(Columns columns) throws IOException, Refused {
            require(tokens.nextToken() == JsonToken.START_OBJECT);
            InternalRow row = object(columns);
            require(tokens.nextToken() == null);
            return row;
        }

        private static void require(boolean condition) throws Refused {
            if (!condition) {
                throw Refused.REFUSED;
            }
        }

        private InternalRow object(Columns columns) throws IOException, Refused {
            require(tokens.currentToken() == JsonToken.START_OBJECT);
            Object[] values = new Object[columns.size];
            boolean[] isSeen = new boolean[columns.names.length];
            int outer = unknown.size();
            int expected = 0;
            for (String name = tokens.nextFieldName(); name != null; name = tokens.nextFieldName()) {
                tokens.nextToken();
                int found = columns.find(name, expected);
                if (found < 0) {
                    require(columns != closed);
                    addUnknown(outer, name);
                    skip();
                } else {
                    require(!isSeen[found]);
                    isSeen[found] = true;
                    values[found] = value(columns.types[found]);
                    expected = found + 1;
                }
            }
            for (int each = 0; each < isSeen.length; each++) {
                require(!columns.isRequired[each] || values[each] != null);
            }
            unknown.subList(outer, unknown.size()).clear();
            return new GenericInternalRow(values);
        }

        private void addUnknown(int outer, String name) throws Refused {
            require(unknown.size() < MOST_UNKNOWN_NAMES);
            for (int each = outer; each < unknown.size(); each++) {
                require(!unknown.get(each).equals(name));
            }
            require(!hasEscapedUnits || !StrictJson.hasHalfACharacter(name));
            unknown.add(name);
        }

        /** Reads a value of any type. */
        private void skip() throws IOException, Refused {
            switch (tokens.currentToken()) {
                case START_OBJECT -> {
                    int outer = unknown.size();
                    for (String name = tokens.nextFieldName(); name != null; name = tokens.nextFieldName()) {
                        addUnknown(outer, name);
                        tokens.nextToken();
                        skip();
                    }
                    unknown.subList(outer, unknown.size()).clear();
                }
                case START_ARRAY -> {
                    while (tokens.nextToken() != JsonToken.END_ARRAY) {
                        skip();
                    }
                }
                case VALUE_STRING -> {
                    if (hasEscapedUnits) {
                        text();
                    }
                }
                default -> { }
            }
        }

        private Object value(Type type) throws IOException, Refused {
            JsonToken token = tokens.currentToken();
            if (token == JsonToken.VALUE_NULL) {
                return null;
            }
            return switch (type.kind) {
                case STRING -> UTF8String.fromString(text());
                case BOOLEAN -> {
                    require(token.isBoolean());
                    yield token == JsonToken.VALUE_TRUE;
                }
                case BYTE -> (byte) integer(Byte.MIN_VALUE, Byte.MAX_VALUE);
                case SHORT -> (short) integer(Short.MIN_VALUE, Short.MAX_VALUE);
                case INT -> (int) integer(Integer.MIN_VALUE, Integer.MAX_VALUE);
                case LONG -> integer(Long.MIN_VALUE, Long.MAX_VALUE);
                case FLOAT -> {
                    float number = isFraction() ? tokens.getFloatValue() : integer(-MOST_EXACT_FLOAT, MOST_EXACT_FLOAT);
                    require(!Float.isInfinite(number));
                    yield number;
                }
                case DOUBLE -> {
                    double number = isFraction() ? tokens.getDoubleValue() : integer(Long.MIN_VALUE, Long.MAX_VALUE);
                    require(!Double.isInfinite(number));
                    yield number;
                }
                case DATE -> new Digits(text(), isUtc).date();
                case TIMESTAMP -> new Digits(text(), isUtc).timestamp();
                case STRUCT -> object(type.columns);
                case ARRAY -> array(type.element);
            };
        }

        private GenericArrayData array(Type element) throws IOException, Refused {
            require(tokens.currentToken() == JsonToken.START_ARRAY);
            List<Object> values = new ArrayList<>();
            while (tokens.nextToken() != JsonToken.END_ARRAY) {
                values.add(value(element));
            }
            return new GenericArrayData(values.toArray());
        }

        private String text() throws IOException, Refused {
            require(tokens.currentToken() == JsonToken.VALUE_STRING);
            String text = tokens.getText();
            require(!hasEscapedUnits || !StrictJson.hasHalfACharacter(text));
            return text;
        }

        private boolean isFraction() {
            return tokens.currentToken() == JsonToken.VALUE_NUMBER_FLOAT;
        }

        private long integer(long least, long greatest) throws IOException, Refused {
            require(tokens.currentToken() == JsonToken.VALUE_NUMBER_INT);
            require(tokens.getNumberType() != JsonParser.NumberType.BIG_INTEGER);
            long number = tokens.getLongValue();
            // A negative zero is a floating point number.
            require(number >= least && number <= greatest && (number != 0 || tokens.getTextLength() == 1));
            return number;
        }
    }

    /** A date or time as text, and the place up to which it was read. */
    private static final class Digits {
        private final String text;
        private final boolean isUtc;
        private int place;

        Digits(String text, boolean isUtc) {
            this.text = text;
            this.isUtc = isUtc;
        }

        /** Returns the next character; 0 at the end. */
        private char peek() {
            return place == text.length() ? 0 : text.charAt(place);
        }

        private boolean isNext(char character) {
            boolean isNext = place < text.length() && text.charAt(place) == character;
            place += isNext ? 1 : 0;
            return isNext;
        }

        private void expect(char character) throws Refused {
            if (!isNext(character)) {
                throw Refused.REFUSED;
            }
        }

        private void expectEnd() throws Refused {
            if (place != text.length()) {
                throw Refused.REFUSED;
            }
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
            int day = day();
            expectEnd();
            return day;
        }

        /** Reads YYYY-MM-DDThh:mm:ss[.f][zone], zone Z or +hh:mm; returns the microseconds since 1970. */
        private long timestamp() throws Refused {
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
            expectEnd();
            return 1_000_000 * seconds + micros;
        }

        /** Reads the zone of a time; returns its seconds before UTC. */
        private int zone() throws Refused {
            char sign = peek();
            if (sign == 0 && isUtc || isNext('Z')) {
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
