"""From a Hugging Face checkpoint, or from a seed, to one rank's packed weights."""
