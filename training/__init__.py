"""Recipe for the small model pair that ships with paceline: corpus, tokenizer, training, GGUF export."""
