"""Names that data sets have for their columns of texts and labels, by task; those of one row are tried in order."""

SINGLE_TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "utterance",
    "query",
    "question",
    "message",
    "comment",
    "tweet",
)
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("question", "context"),
)
TEXTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sequence-classification": (*PAIRS, *((name,) for name in SINGLE_TEXTS)),
    "token-classification": (("tokens",), ("words",), ("text",), ("sentence",)),
    "question-answering": (("question", "context"),),
    "masked-lm": tuple((name,) for name in SINGLE_TEXTS),
}
LABELS: dict[str, tuple[str, ...]] = {
    "sequence-classification": ("label", "labels", "intent", "category", "class", "target", "sentiment", "topic"),
    "token-classification": ("ner_tags", "tags", "labels", "label", "ner", "pos_tags", "chunk_tags"),
    "question-answering": ("answers", "answer", "answer_text"),
    "masked-lm": (),
}
