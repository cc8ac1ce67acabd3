"""The explorer: a page on which one sees kernel attention. `linattn explore` serves it, `--save` writes it to one file.

The page is `page.html.j2` with the JavaScript modules of `js/`, which compute everything that it shows; tests hold their
numbers to the library's.
"""
