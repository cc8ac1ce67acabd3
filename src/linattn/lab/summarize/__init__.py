"""The summarizer: a document of any length in, one line out, with every attention replaceable by a linear kernel."""
