"""What is known of vocabularies: how those of two models relate, and which tokens close a turn."""
