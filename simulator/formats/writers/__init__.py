"""What a prediction is written as: a file a format."""
