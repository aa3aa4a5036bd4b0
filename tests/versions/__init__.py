"""The validator under several versions of torch, each in an environment of its own."""
