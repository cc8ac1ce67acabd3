"""The summarizer: documents of any length to one line, with any kernel in every attention."""
