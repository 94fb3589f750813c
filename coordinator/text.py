"""The text edge: prompts become token ids, output tokens become text.

Pure computation without a lock, never called from the event loop. Prompts may be encoded on any number of threads while
another one pushes tokens into detokenizers: what they share never changes, and each thread has a chat template of its own.
"""

import threading
from collections.abc import Sequence

from coordinator.chat import ChatTemplate
from coordinator.detokenizer import Detokenizer
from coordinator.text_errors import TextRefused
from coordinator.token_bytes import TokenBytes
from model_files import ModelFiles

MAX_TEXT_BYTES = 8 << 20
"""Longest text that is tokenised: 2 million tokens of prose."""

MAX_MESSAGES = 4096


class _Chat(threading.local):
    """What a thread renders with: a template may not be used by two at once."""

    template: ChatTemplate | None = None


class TextEdge:
    """Tokenizer, chat template and detokenizers of one model; `ModelRefused` when its tokenizer is not supported."""

    def __init__(self, model: ModelFiles, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._tokenizer = model.tokenizer()
        self._bos = [model.bos_token_id] if model.add_bos and model.bos_token_id is not None else []
        self._token_bytes = TokenBytes(self._tokenizer)
        self._chat_template = model.chat_template
        self._special_tokens = model.special_tokens
        self._chat = _Chat()
        self._max_text_bytes = max_text_bytes
        self.vocab_size = model.shape.vocab_size
        self.eos_token_ids = model.eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text prompt, with BOS in front if the model wants it.

        `TextRefused` for an empty text or one of more than `max_text_bytes` bytes of UTF-8.
        """
        if not text:
            raise TextRefused("text", "(empty)", "at least 1 character")
        return self._bos + self._ids("text", text)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation of (role, content), rendered by the model's template up to the assistant's turn.

        `TextRefused` for no or too many messages, a message without role, texts over `max_text_bytes` in all, a model
        without a template, or a template that refuses the conversation.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise TextRefused("chat", f"{len(messages)} messages", f"1 to {MAX_MESSAGES} messages")
        if not all(role for role, _ in messages):
            raise TextRefused("chat.role", "(empty)", "at least 1 character")
        self._check_size("chat", sum(len(part.encode()) for message in messages for part in message))
        return self._ids("chat", self._template().render(messages))

    def detokenizer(self, stop: Sequence[str] = (), min_tokens: int = 0) -> Detokenizer:
        """A fresh detokenizer for one request's output; see `Detokenizer`."""
        return Detokenizer(self._token_bytes, stop, min_tokens)

    def _template(self) -> ChatTemplate:
        template = self._chat.template
        if template is None:
            if self._chat_template is None:
                raise TextRefused("chat", "messages", "text or token ids, the model has no chat template")
            template = self._chat.template = ChatTemplate(self._chat_template, self._special_tokens)
        return template

    def _ids(self, field: str, text: str) -> list[int]:
        self._check_size(field, len(text.encode()))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _check_size(self, field: str, size: int) -> None:
        if size > self._max_text_bytes:
            raise TextRefused(field, f"{size} bytes", f"{self._max_text_bytes} bytes")
