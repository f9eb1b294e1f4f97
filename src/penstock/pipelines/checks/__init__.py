"""What a pipeline file must hold beyond the type of each value. Reads the model, never Spark."""
