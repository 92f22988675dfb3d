"""Small gloo programs that hang, crash, lag or are quite all right: publicly reported cases, variants of our own, and controls."""
