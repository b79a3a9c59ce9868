"""Fine-tuning from a file to a saved model: inside a budget, resumable to the bit."""
