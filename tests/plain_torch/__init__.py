"""Plans on fake tensors beside plain torch: the same steps with real tensors, counted by torch's own allocator."""
