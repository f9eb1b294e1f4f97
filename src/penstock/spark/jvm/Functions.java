package penstock.spark;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
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
 * {@code exact_json:} and the schema as JSON. Before the colon there is {@code _utc} if times without a zone are in UTC,
 * then {@code _closed} if objects with other names than the columns are refused.
 */
public final class Functions implements FunctionCatalog {
    private static final Pattern NAME = Pattern.compile("exact_json(_utc)?(_closed)?:(.*)", Pattern.DOTALL);

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
        Matcher found = NAME.matcher(identifier.name());
        if (!found.matches()) {
            throw new IllegalArgumentException("no function " + identifier.name());
        }
        StructType schema = (StructType) DataType.fromJson(found.group(3));
        return new Unbound(new ExactJson(schema, found.group(1) != null, found.group(2) != null));
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
