"""Reading of tensors and values, and comparison of what several ranks' files hold."""
