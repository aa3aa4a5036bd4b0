"""Samples of one machine against each other and against its own earlier ones: what is slow, what became slower, how sure."""
