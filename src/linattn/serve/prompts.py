"""Texts and conversations to tokens, and where their turns end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
MARK = "\u2063linattn\u2063"  # stands for a text that is not known yet, in a rendered template
GAP = "\n\n"  # between a document and the question after it
PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant: "}


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the positions at which a turn ends, where a state is worth keeping.

    goes_on: the answer is more of the same text, not a turn of its own.
    """

    tokens: list[int]
    boundaries: list[int] = field(default_factory=list)
    goes_on: bool = False


class PromptError(ValueError):
    """A conversation that the model's template cannot take, or a text that no tokenizer can."""


class Prompts:
    """The tokenizer and its chat template. Models without a template get a plain one, "User: .." and "Assistant: ..".

    Thread-safe: fast tokenizers of transformers are, and nothing else changes.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def text(self, text: str) -> Prompt:
        """A plain text, with the tokens that begin one, if the model has any."""
        return Prompt(self._ids(text, special=True), goes_on=True)

    def tail(self, text: str) -> Prompt:
        """A text that continues a state."""
        return Prompt(self._ids(text), goes_on=True)

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation, up to where the assistant's answer begins."""
        whole = self._render(messages, answer=True)
        return self._with_boundaries(whole, self._turn_ends(messages, whole), special=not self.has_template)

    def read_messages(self, messages: Sequence[Message]) -> Prompt:
        """A conversation to be continued later."""
        whole = self._render(messages, answer=False)
        return self._with_boundaries(whole, self._turn_ends(messages, whole), special=not self.has_template)

    def continue_messages(self, earlier: Sequence[Message], messages: Sequence[Message]) -> Prompt:
        """The tokens of `messages` behind a state of the messages `earlier`."""
        before, whole = self._render(earlier, answer=False), self._render([*earlier, *messages], answer=True)
        if not whole.startswith(before):
            raise PromptError(
                "the chat template of this model changes earlier messages, so a state of them cannot be continued."
            )
        ends = self._turn_ends([*earlier, *messages], whole)
        return self._with_boundaries(whole[len(before) :], [end - len(before) for end in ends if end > len(before)])

    def document(self, text: str) -> Prompt:
        """A document at the beginning of the user's first message; a question will follow in the same message."""
        head = self._render([{"role": "user", "content": text + GAP + MARK}], answer=False).partition(MARK)[0]
        return Prompt(self._ids(head, special=not self.has_template))

    def continue_document(self, messages: Sequence[Message]) -> Prompt:
        """The tokens of a conversation whose first message continues a document."""
        if not messages or messages[0].get("role") != "user":
            raise PromptError("this state is a document: the first message after it must be the user's question.")
        first = {"role": "user", "content": MARK + str(messages[0]["content"])}
        whole = self._render([first, *messages[1:]], answer=True)
        cut = whole.find(MARK) + len(MARK)
        ends = [end for end in self._turn_ends([first, *messages[1:]], whole) if end > cut]
        return self._with_boundaries(whole[cut:], [end - cut for end in ends])

    # --------------------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, answer: bool) -> str:
        if not self.has_template:
            lines = [PLAIN_ROLES.get(str(m["role"]), f"{m['role']}: ") + str(m["content"]) + "\n" for m in messages]
            return "".join(lines) + ("Assistant:" if answer else "")
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
            )
        except Exception as error:  # templates raise what they like
            said = str(error).strip().split("\n")[0]
            raise PromptError(f"the chat template of this model refuses these messages: {said}") from error

    def _turn_ends(self, messages: Sequence[Message], whole: str) -> list[int]:
        """Characters after which a message of the rendered conversation ends."""
        ends = []
        for i in range(1, len(messages) + 1):
            try:
                part = self._render(messages[:i], answer=False)
            except PromptError:  # some templates want turns to alternate, or to end with the user
                continue
            if whole.startswith(part):
                ends.append(len(part))
        return ends

    def _with_boundaries(self, text: str, ends: Sequence[int], *, special: bool = False) -> Prompt:
        """Tokens of a rendered text, and the token after each of the ends.

        special: add the tokens that begin a text; those of a chat template are in the rendered text already.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            return Prompt(self._ids(text, special=special))
        _check_unicode(text)
        found = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        first: dict[int, int] = {}  # character -> the first token that starts there
        for place, (start, _) in enumerate(found.offset_mapping):
            first.setdefault(start, place)
        places = {first[end] for end in ends if end in first}
        return Prompt(list(found.input_ids), sorted(place for place in places if place > 0))

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        _check_unicode(text)
        return [int(i) for i in self._tokenizer(text, add_special_tokens=special).input_ids]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text is not valid Unicode: character {error.start} is half of a surrogate pair."
        ) from None
