"""From a prompt to text: tokenizer, sampling, the loop of a decoder, and the processes of its ranks."""
