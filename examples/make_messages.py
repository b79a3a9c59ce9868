"""Write `messages.csv` and `messages_dev.csv`: short messages to a shop, labelled praise or complaint.

    python examples/make_messages.py

The sentences are put together from parts, the same way every time; no sentence is in both files.
"""

import csv
import itertools
import random
from pathlib import Path

THINGS = [
    "kettle",
    "coat",
    "lamp",
    "backpack",
    "bicycle",
    "keyboard",
    "garden chair",
    "pair of boots",
    "desk",
    "blender",
]
PRAISE = [
    "The {thing} arrived two days early and works perfectly.",
    "I have used the {thing} every day for a month and still love it.",
    "Thank you for the {thing}, it is exactly what my sister wanted.",
    "Great {thing}, sturdy and much nicer than in the pictures.",
    "Your staff helped me choose a {thing} and were wonderful.",
    "Best {thing} I have ever owned.",
    "The {thing} was easy to put together and looks lovely.",
    "Very happy with the {thing}, I will order another one.",
    "What a good price for such a well made {thing}!",
    "Everyone who visits asks where I found this beautiful {thing}.",
]
COMPLAINT = [
    "The {thing} came with a crack and nobody answers my letters.",
    "After a week the {thing} stopped working altogether.",
    "I paid for express delivery and the {thing} is still not here.",
    "This {thing} is nothing like the description, I want my money back.",
    "The {thing} smells of glue and the colour is wrong.",
    "Do not buy this {thing}, it fell apart in my hands.",
    "Twice you have sent me the wrong {thing}.",
    "The instructions for the {thing} are useless and two screws were missing.",
    "I waited an hour on the phone about my broken {thing}.",
    "Far too expensive for a {thing} that lasts one winter.",
]
NUM_DEV = 40


def main() -> None:
    rows = [(text.format(thing=thing), "praise") for text, thing in itertools.product(PRAISE, THINGS)]
    rows += [(text.format(thing=thing), "complaint") for text, thing in itertools.product(COMPLAINT, THINGS)]
    random.Random(0).shuffle(rows)
    folder = Path(__file__).parent
    for name, chosen in (("messages_dev.csv", rows[:NUM_DEV]), ("messages.csv", rows[NUM_DEV:])):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([("text", "label"), *chosen])


if __name__ == "__main__":
    main()
