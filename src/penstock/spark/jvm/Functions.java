package penstock.spark;

import org.apache.spark.sql.connector.catalog.FunctionCatalog;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.functions.BoundFunction;
import org.apache.spark.sql.connector.catalog.functions.UnboundFunction;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A catalog with the functions {@link ExactJson}, one for each schema.
 *
 * Spark tells a function the types of its arguments, not their values, so the schema is part of the function's name:
 * {@code exact_json:} or, if times without a zone are in UTC, {@code exact_json_utc:}, and the schema as JSON.
 */
public final class Functions implements FunctionCatalog {
    private static final String PREFIX = "exact_json:";
    private static final String PREFIX_UTC = "exact_json_utc:";

    private String name;

    @Override
    public void initialize(String name, CaseInsensitiveStringMap options) {
        this.name = name;
    }

    @Override
    public String name() {
        return name;
    }

    @Override
    public Identifier[] listFunctions(String[] namespace) {
        return new Identifier[0];
    }

    @Override
    public UnboundFunction loadFunction(Identifier identifier) {
        String function = identifier.name();
        boolean isUtc = function.startsWith(PREFIX_UTC);
        if (!isUtc && !function.startsWith(PREFIX)) {
            throw new IllegalArgumentException("no function " + function);
        }
        String schema = function.substring((isUtc ? PREFIX_UTC : PREFIX).length());
        return new Unbound(new ExactJson((StructType) DataType.fromJson(schema), isUtc));
    }

    private record Unbound(ExactJson function) implements UnboundFunction {
        @Override
        public BoundFunction bind(StructType inputType) {
            return function;
        }

        @Override
        public String description() {
            return "parses a JSON object into a struct, or returns null";
        }

        @Override
        public String name() {
            return function.name();
        }
    }
}
