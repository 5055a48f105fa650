"""Graph and Plan types."""
