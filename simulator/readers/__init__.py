"""Readers: one file a format, from other tools' files to the nouns of this package."""
