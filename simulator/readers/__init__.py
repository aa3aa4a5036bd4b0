"""Readers: a file a format, each turned into one of the nouns."""
