"""Formats: every file format in and out. Readers, writers, exchange between plan formats, studies."""
