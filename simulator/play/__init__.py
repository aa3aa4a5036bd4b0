"""Play: time. A plan lowered to programs, and the engine that plays them on streams and links."""
