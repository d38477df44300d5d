"""Chats as texts, by the template of a tokenizer, and which parts of them the assistant wrote."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from common import UserError, printable

MOST_SAID = 300  # characters of what a template says
Spans = list[tuple[int, int]]  # of characters: the first, and the one behind the last


class Template:
    """Writes chats as texts, as transformers' apply_chat_template does."""

    def __init__(self, source: str, special: Mapping[str, str], name: str, column: str, path: str) -> None:
        """Compile a template.

        Args:
            source: of the template, in Jinja's language.
            special: the tokens that it may write, such as "eos_token".
            name: of the data set, for errors.
            column: of the chats, for errors.
            path: of the tokenizer, for errors.

        Raises:
            UserError: it is no template.
        """
        self._where = f"--text-columns {column}: the chat template"
        self._name = name
        import jinja2  # slow to import; torch brings it

        # No chat can contain them: each process draws others, and no text keeps them.
        self._begin, self._end = (f"<{which}-{secrets.token_hex(16)}>" for which in ("begin", "end"))
        self._errors = (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
        environment = _environment(self._begin, self._end)

        def raise_exception(message: str) -> None:
            reason = printable(str(message), MOST_SAID)
            raise UserError(f"{self._where} refuses a chat of --data {name}: {reason}")

        def tojson(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment.globals.update(special, raise_exception=raise_exception)
        environment.filters["tojson"] = tojson  # jinja's own one is for HTML: it escapes <, > and &
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"--tokenizer {path}: its chat template cannot be read: {error}") from error
        self.has_marks = any(token[1:] == ("name", "generation") for token in environment.lex(source))

    def text(self, messages: Any) -> str:
        """A chat as a text."""
        return self._render(_known(messages)).replace(self._begin, "").replace(self._end, "")

    def answers(self, messages: Any) -> tuple[str, Spans]:
        """A chat as a text, and what of it the assistant wrote.

        That is what stands between the template's `generation` marks. Of a template without them, it is what each
        message of the assistant adds to the text of those before it and of the prompt for an answer.

        Raises:
            UserError: a message of the assistant changes the text before it, so nobody can tell what it adds.
        """
        messages = _known(messages)
        if self.has_marks:
            return self._split(self._render(messages))
        text = self.text(messages)
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:i], add_generation_prompt=True)
            after = self._render(messages[: i + 1])
            if not (after.startswith(before) and text.startswith(after)):
                shown = printable(str(message.get("content", "")), MOST_SAID)
                raise UserError(
                    f"--loss-on answers: {self._where[self._where.index('the') :]} writes what stands before message "
                    f"{i + 1} of a chat of --data {self._name} in another way once it is answered, so nobody can tell "
                    f"what the answer adds ({shown!r}): put {{% generation %}} and {{% endgeneration %}} around the "
                    "assistant's text in the template"
                )
            spans.append((len(before), len(after)))
        return text, spans

    @staticmethod
    def counted(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
        """Whether each token has a character of a span.

        Args:
            offsets: of the tokens in the text: the first character of each, and the one behind its last.
            spans: that ascend.
        """
        found = []
        i = 0
        for first, last in offsets:
            while i < len(spans) and spans[i][1] <= first:
                i += 1
            found.append(i < len(spans) and max(first, spans[i][0]) < min(last, spans[i][1]))
        return found

    def _render(self, messages: Any, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except UserError as error:
            raise UserError(f"{error} (the chat begins {_beginning(messages)})") from error
        except self._errors as error:
            raise UserError(
                f"{self._where} fails on a chat of --data {self._name}, which begins {_beginning(messages)}: {error}"
            ) from error

    def _split(self, marked: str) -> tuple[str, Spans]:
        """A text without the marks, and what stood between them."""
        first, *others = marked.split(self._begin)
        text = first
        spans = []
        for other in others:
            inside, _, outside = other.partition(self._end)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return text, spans


def _known(messages: Any) -> Any:
    """Messages without keys that have no value: `datasets` adds them where other messages have one."""
    if not isinstance(messages, list):
        return messages
    return [{key: one for key, one in message.items() if one is not None} for message in messages]


def _beginning(messages: Any) -> str:
    """The first words of a chat, for an error."""
    first = messages[0] if messages else {}
    return repr(printable(str(first.get("content", first)), 60))


def _environment(begin: str, end: str) -> Any:
    """What templates are compiled in: sandboxed, because a template is a stranger's code.

    `{% generation %}` and `{% endgeneration %}`, which stand around what the assistant wrote, write `begin` and `end`.
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
