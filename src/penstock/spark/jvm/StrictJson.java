package penstock.spark;

import com.fasterxml.jackson.core.JacksonException;
import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadFeature;
import java.io.IOException;
import org.apache.spark.sql.api.java.UDF1;

/**
 * A function of Spark SQL that returns true for a text that is exactly one JSON value whose objects have distinct names.
 *
 * from_json stops after the first value, and uses the last of two equal names. This function reads the tokens only. The
 * argument is the UTF-8 text as BINARY, which Spark passes without a conversion; null if the argument is null.
 */
public final class StrictJson implements UDF1<byte[], Boolean> {
    private static final long serialVersionUID = 1L;
    private static final JsonFactory FACTORY =
        JsonFactory.builder().enable(StreamReadFeature.STRICT_DUPLICATE_DETECTION).build();

    @Override
    public Boolean call(byte[] value) throws IOException {
        return value == null ? null : isOneValue(value);
    }

    private static boolean isOneValue(byte[] text) throws IOException {
        if (isDetectedEncoding(text)) {
            return false;
        }
        boolean hasEscapedUnits = hasEscapedUnits(text);
        try (JsonParser tokens = FACTORY.createParser(text)) {
            JsonToken token = tokens.nextToken();
            if (token == null) {
                return false;
            }
            int depth = 0;
            do {
                if (token.isStructStart()) {
                    depth++;
                } else if (token.isStructEnd()) {
                    depth--;
                } else if (hasEscapedUnits && !token.isNumeric() && hasHalfACharacter(tokens.getText())) {
                    return false;
                }
                token = tokens.nextToken();
            } while (depth > 0 && token != null);
            return token == null;
        } catch (JacksonException error) {
            return false;
        }
    }

    /** Returns true for a byte order mark, and for zero bytes, which the parser takes for UTF-16 or UTF-32. */
    static boolean isDetectedEncoding(byte[] text) {
        for (int place = 0; place < Math.min(text.length, 4); place++) {
            if (text[place] == 0) {
                return true;
            }
        }
        return text.length > 0 && (text[0] == (byte) 0xEF || text[0] == (byte) 0xFE || text[0] == (byte) 0xFF);
    }

    /** Returns true if the text may have an escaped UTF-16 code unit: only these can be half of a character. */
    static boolean hasEscapedUnits(byte[] text) {
        for (int place = 1; place < text.length; place++) {
            if (text[place] == 'u' && text[place - 1] == '\\') {
                return true;
            }
        }
        return false;
    }

    static boolean hasHalfACharacter(String text) {
        for (int place = 0; place < text.length(); place++) {
            if (Character.isSurrogate(text.charAt(place))) {
                boolean isPair = Character.isHighSurrogate(text.charAt(place))
                    && place + 1 < text.length()
                    && Character.isLowSurrogate(text.charAt(place + 1));
                if (!isPair) {
                    return true;
                }
                place++;
            }
        }
        return false;
    }
}
