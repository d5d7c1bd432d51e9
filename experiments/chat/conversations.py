"""Write conversations.jsonl: 200 small conversations about sums and products, of one to three questions.

python experiments/chat/conversations.py > experiments/chat/conversations.jsonl
"""

from __future__ import annotations

import json
import random

SYSTEM = "Answer with the number, in one sentence."
OPERATIONS = (
    ("plus", lambda a, b: a + b),
    ("minus", lambda a, b: a - b),
    ("times", lambda a, b: a * b),
)


def conversation(generator: random.Random) -> dict[str, list[dict[str, str]]]:
    """A system prompt in every third conversation, then questions and answers."""
    messages = [{"role": "system", "content": SYSTEM}] if generator.random() < 1 / 3 else []
    for _ in range(generator.randint(1, 3)):
        name, compute = generator.choice(OPERATIONS)
        a, b = generator.randint(0, 20), generator.randint(0, 20)
        messages.append({"role": "user", "content": f"What is {a} {name} {b}?"})
        messages.append({"role": "assistant", "content": f"{a} {name} {b} is {compute(a, b)}."})
    return {"messages": messages}


if __name__ == "__main__":
    generator = random.Random(0)
    for _ in range(200):
        print(json.dumps(conversation(generator)))
