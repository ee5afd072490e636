"""What the training conversations start from.

Each head is the beginning of a document in the chat template, up to and including the first words of a user's turn. The
target writes the rest of the turn itself, so these lists only spread the topics and the kinds of request. A few documents
are plain text without a template, so that the drafter also meets contexts of a handful of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly tutor who explains things step by step.",
    "You are an expert programmer. Answer with short, working code.",
    "Answer briefly and precisely.",
    "You are a creative writer.",
    "You are an AI assistant that follows instructions extremely well.",
)

OPENINGS = (
    "What is", "What are", "What does", "What was", "What would happen if", "What should I", "What makes", "What kind of",
    "Who was", "Who invented", "When did", "Where can I", "Where is", "Which is better,", "Why do", "Why is", "Why did",
    "How do I", "How does", "How can I", "How many", "How much", "How would you", "How long does it take to",
    "Can you", "Could you", "Can you explain", "Can you help me", "Could you write", "Please", "Please help me",
    "Explain", "Describe", "Summarize", "Compare", "Define", "Discuss", "Outline", "Analyze", "Classify", "Translate",
    "Rewrite", "Edit", "Correct the grammar of", "Write a short story about", "Write a poem about", "Write an essay on",
    "Write an email to", "Write a letter to", "Write a Python function that", "Write a program to", "Write code that",
    "Write a SQL query", "Write a product description for", "Write a blog post about", "Write a dialogue between",
    "Write three sentences about", "Write a headline for", "Write a speech about", "Create a list of", "Create a plan for",
    "Create a recipe", "Create a schedule for", "Make a list of", "Make a table of", "Give me", "Give me five",
    "Give me an example of", "Give me some advice on", "Give an argument for", "List", "List five", "List the steps to",
    "Name three", "Name a", "Suggest", "Recommend", "Tell me about", "Tell me a joke about", "Tell me how to",
    "Generate", "Design", "Brainstorm", "Imagine", "Pretend you are", "Act as a", "Find", "Calculate", "Solve", "Convert",
    "Simplify", "Is it", "Is there", "Are there", "Does", "Do you", "Should I", "I want to", "I need", "I need help with",
    "I am trying to", "I have", "I'm working on", "I'm writing", "My", "The", "If", "In", "For", "Hello", "Hi", "Hey,",
    "Thanks", "A", "Let's", "Here is", "Given", "You are given", "Consider", "Suppose", "Using", "Based on",
    "Provide", "Identify", "Develop", "Prepare", "Show me", "Draft", "Compose", "Paraphrase", "Extract", "Complete",
)  # fmt: skip

REQUESTS = (
    "What is {}?", "What are the main facts about {}?", "Explain {} to a child.", "Explain {} in simple terms.",
    "Tell me about {}.", "Write a short story about {}.", "Write a poem about {}.", "Write an essay about {}.",
    "Give me five tips about {}.", "List ten facts about {}.", "Why is {} important?", "How does {} work?",
    "What are the advantages and disadvantages of {}?", "Write an email about {}.", "Create a quiz about {}.",
    "Summarize the history of {}.", "Describe {} in three sentences.", "What is the best way to learn about {}?",
    "Write a dialogue about {}.", "How has {} changed over time?", "I want to know more about {}.",
    "What should everyone know about {}?", "Compare {} and", "Write a Python program about {}.",
    "Can you help me with {}?", "Give me an introduction to {}.", "What is the future of {}?", "How do I get started with {}?",
)  # fmt: skip

TOPICS = (
    "the moon", "volcanoes", "photosynthesis", "gravity", "black holes", "the water cycle", "earthquakes", "the ocean",
    "climate change", "recycling", "solar power", "wind energy", "nuclear energy", "electric cars", "batteries", "magnets",
    "atoms", "chemical reactions", "acids and bases", "cells", "DNA", "evolution", "the immune system", "the human heart",
    "the brain", "sleep", "dreams", "memory", "vitamins", "exercise", "yoga", "running", "swimming", "football", "chess",
    "basketball", "tennis", "cycling", "hiking", "camping", "gardening", "composting", "houseplants", "bees", "butterflies",
    "dogs", "cats", "horses", "elephants", "whales", "penguins", "dinosaurs", "birds", "spiders", "the rainforest",
    "deserts", "rivers", "mountains", "islands", "Antarctica", "Africa", "India", "Japan", "China", "Brazil", "Canada",
    "France", "Italy", "Egypt", "Greece", "the Roman Empire", "the Middle Ages", "the Renaissance", "the industrial revolution",
    "the French Revolution", "the American Civil War", "the First World War", "the Second World War", "the Cold War",
    "democracy", "human rights", "the constitution", "elections", "taxes", "inflation", "supply and demand", "the stock market",
    "saving money", "budgeting", "starting a business", "marketing", "customer service", "leadership", "teamwork",
    "time management", "public speaking", "job interviews", "writing a resume", "negotiation", "remote work", "meetings",
    "email etiquette", "project management", "education", "homework", "studying", "reading", "libraries", "universities",
    "teachers", "mathematics", "fractions", "algebra", "geometry", "probability", "statistics", "prime numbers", "calculus",
    "logic", "algorithms", "sorting", "recursion", "databases", "the internet", "web browsers", "search engines",
    "artificial intelligence", "machine learning", "neural networks", "robots", "drones", "computers", "operating systems",
    "programming languages", "Python lists", "JavaScript", "HTML and CSS", "SQL joins", "linked lists", "binary trees",
    "hash tables", "encryption", "passwords", "privacy", "social media", "video games", "smartphones", "cameras",
    "photography", "painting", "sculpture", "architecture", "music", "jazz", "the piano", "the guitar", "opera", "dance",
    "theater", "movies", "animation", "comic books", "poetry", "novels", "fairy tales", "mythology", "folklore", "ghosts",
    "dragons", "pirates", "castles", "knights", "kings and queens", "detectives", "time travel", "space travel", "Mars",
    "the solar system", "stars", "galaxies", "satellites", "telescopes", "astronauts", "rockets", "airplanes", "trains",
    "ships", "bridges", "roads", "cities", "villages", "farms", "markets", "restaurants", "cooking", "baking bread", "pasta",
    "soup", "salads", "chocolate", "coffee", "tea", "cheese", "fruit", "vegetables", "spices", "breakfast", "picnics",
    "birthdays", "weddings", "holidays", "traditions", "festivals", "families", "friendship", "love", "kindness", "honesty",
    "courage", "patience", "happiness", "stress", "anxiety", "meditation", "mindfulness", "habits", "goals", "motivation",
    "creativity", "curiosity", "failure", "success", "philosophy", "ethics", "religion", "language", "grammar", "translation",
    "alphabets", "writing", "journalism", "news", "advertising", "fashion", "clothes", "shoes", "jewelry", "furniture",
    "houses", "apartments", "cleaning", "laundry", "moving to a new city", "travel", "airports", "hotels", "beaches",
    "museums", "zoos", "parks", "weather", "storms", "snow", "rain", "seasons", "autumn leaves", "fire", "ice", "light",
    "sound", "color", "time", "money", "energy", "water", "air", "soil", "plastic", "paper", "glass", "steel", "wood", "gold",
    "medicine", "hospitals", "doctors", "nurses", "vaccines", "allergies", "headaches", "first aid", "teeth", "eyes", "skin",
    "aging", "babies", "teenagers", "grandparents", "neighbors", "volunteering", "charity", "law", "police", "firefighters",
    "engineers", "scientists", "inventors", "explorers", "artists", "writers", "musicians", "athletes", "farmers", "sailors",
)  # fmt: skip

TEXT_STARTS = (
    "The", "In", "A", "It was", "Once upon a time", "There are", "This is", "When", "The history of", "According to",
    "One of the", "In 1969", "def ", "import ", "class ", "# ", "The first", "For example,", "Question:", "1.", "Dear",
    "We", "He", "She", "They", "If you", "To", "Many people", "Most", "Some", "Scientists", "Today", "In the",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """How one document begins. `speaker` is who goes on from there."""

    tokens: tuple[int, ...]
    text_only: bool  # no template: the model continues as in its answers


def chat_head(tokenizer: Tokenizer, system: str | None, user: str, *, complete: bool) -> Head:
    """A chat up to `user`; a complete user's turn is closed, and the assistant's is opened."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""
    text += f"<|im_start|>user\n{user}"
    if complete:
        text += "<|im_end|>\n<|im_start|>assistant\n"
    return Head(tuple(tokenizer.encode(text, add_special_tokens=False).ids), text_only=complete)


def training_heads(tokenizer: Tokenizer, count: int, seed: int) -> list[Head]:
    """`count` heads drawn from the lists above."""
    rng = random.Random(seed)
    heads = []
    for _ in range(count):
        if rng.random() < 0.08:
            text = rng.choice(TEXT_STARTS)
            if rng.random() < 0.5:
                text += " " + rng.choice(TOPICS)
            heads.append(Head(tuple(tokenizer.encode(text, add_special_tokens=False).ids), text_only=True))
            continue
        draw = rng.random()
        system = DEFAULT_SYSTEM if draw < 0.85 else rng.choice(SYSTEMS) if draw < 0.95 else None
        draw = rng.random()
        if draw < 0.2:
            user = ""
        elif draw < 0.6:
            user = rng.choice(OPENINGS)
        elif draw < 0.8:
            user = rng.choice(OPENINGS) + " " + rng.choice(TOPICS)
        else:
            user = rng.choice(REQUESTS).format(rng.choice(TOPICS))
        heads.append(chat_head(tokenizer, system, user, complete=False))
    return heads
