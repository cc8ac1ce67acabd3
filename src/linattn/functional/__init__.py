"""The public functions: each checks its arguments, runs one engine and restores the caller's layout."""
