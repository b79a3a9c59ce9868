"""What several tasks call: rows read, texts tokenized, losses and metrics as sums."""
