"""Training of the bundled model: corpus, tokenizer, tasks, the model, export, evaluation."""
