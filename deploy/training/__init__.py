"""Training of the bundled model: corpus, tokenizer, tasks, differentiable K3, export, evaluation."""
