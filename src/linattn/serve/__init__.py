"""A local server with OpenAI's protocol: a document is read once, and every question after it starts from its state.

`linattn serve` runs it; `linattn read` and `linattn ask` do the same without a server. The extra `serve` brings what it needs.
"""
