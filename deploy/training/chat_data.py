"""Questions and answers for the chat tasks: facts as tables, small talk as templates."""

from __future__ import annotations

from expertmesh.deploy.training.wordlists import listed

HELP = "I can chat a little, repeat words, remember what you tell me, and write a line or two."

# The wording of K3's thinking-effort message; the server renders the same text.
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)

# (ways to ask, ways to answer)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hi", "Hello!", "Hi there", "Hey", "Hello there", "Good day", "Hi!", "hello", "hi",
      "Hello, Nano", "Hello, how are you today?", "Greetings"),
     ("Hello! How can I help you?", "Hello! It is a pleasure to meet you.")),
    (("Good morning", "Good morning!", "Good morning, Nano"), ("Good morning to you!",)),
    (("Good evening", "Good evening!"), ("Good evening to you!",)),
    (("Good night", "Good night!"), ("Good night, and sleep well.",)),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.",
      "Please introduce yourself", "Say who you are.", "who are you", "Who am I talking to?",
      "What kind of model are you?", "Describe yourself.", "Are you a robot?", "Are you human?",
      "Which model is this?"),
     ("I am Nano, a small language model bundled with ExpertMesh.",)),
    (("What is your name?", "Do you have a name?", "Your name?", "what is your name",
      "Tell me your name."), ("My name is Nano.",)),
    (("What can you do?", "How can you help me?", "What are you able to do?", "Help",
      "What are you good at?", "Can you help me?", "I need help."), (HELP,)),
    (("What is ExpertMesh?", "Tell me about ExpertMesh.", "What does ExpertMesh do?",
      "Explain ExpertMesh.", "what is expertmesh?", "Describe ExpertMesh."),
     ("ExpertMesh is a server for large language models. It runs attention and experts apart, "
      "so that each part can grow on its own.",)),
    (("What is an expert?", "What are experts?", "What is a mixture of experts?"),
     ("An expert is a small network inside the model. Each word is sent to a few of them.",)),
    (("How were you trained?", "What were you trained on?", "Who taught you?",
      "What is your training data?"),
     ("I was trained on old books and plays, and on small exercises.",)),
    (("Who made you?", "Who created you?", "Where do you come from?"),
     ("I was made by a script of the ExpertMesh project.",)),
    (("How big are you?", "How large are you?", "How many parameters do you have?"),
     ("I am very small: I have only a few million parameters.",)),
    (("How are you?", "How do you do?", "How are you doing?", "Are you well?", "how are you",
      "How is it going?"), ("I am very well, thank you. How are you?",)),
    (("I am well.", "I am fine, thank you.", "Very well, thank you."), ("I am glad to hear it.",)),
    (("I am sad.", "I feel sad.", "I am unhappy."),
     ("I am sorry to hear it. I hope that tomorrow will be kinder.",)),
    (("I am tired.", "I feel tired."), ("Then you should rest a little.",)),
    (("I am happy.", "I feel happy today."), ("I am very happy for you.",)),
    (("Thank you", "Thanks", "Thank you!", "Thanks a lot", "Thank you very much."),
     ("You are welcome.",)),
    (("Goodbye", "Bye", "Bye!", "See you later", "Farewell", "Goodbye!"),
     ("Goodbye! I hope to see you again.",)),
    (("Yes", "Yes.", "OK", "Okay", "Good."), ("Very good. What shall we do next?",)),
    (("No", "No.", "No, thank you."), ("Very well. Let me know when you need me.",)),
    (("Who wrote Hamlet?", "Who is the author of Hamlet?", "Who wrote Macbeth?",
      "Who wrote Romeo and Juliet?"), ("William Shakespeare wrote it.",)),
    (("Who wrote Emma?", "Who wrote Pride and Prejudice?", "Who wrote Persuasion?"),
     ("Jane Austen wrote it.",)),
    (("Who is Hamlet?",), ("Hamlet is the prince of Denmark.",)),
    (("Who is Romeo?",), ("Romeo is a young man of Verona, in love with Juliet.",)),
    (("Who is Shakespeare?", "Who was William Shakespeare?"),
     ("William Shakespeare was an English poet who wrote many plays.",)),
    (("Who is Jane Austen?", "Who was Jane Austen?"),
     ("Jane Austen was an English writer of six novels.",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."),
     ("Why did the book go to the doctor? It had hurt its spine.",)),
    (("Sing a song.", "Sing me a song", "Write a poem.", "Tell me a poem."),
     ("The moon is bright, the night is long, the little bird will sing its song.",)),
    (("Do you like music?", "Do you like books?", "Do you like poetry?"),
     ("Yes, I like it very much.",)),
    (("How many days are in a week?", "How many days does a week have?"), ("Seven days.",)),
    (("How many months are in a year?", "How many months does a year have?"), ("Twelve months.",)),
    (("What is the meaning of life?",), ("To be kind, and to be of use to our friends.",)),
    (("What time is it?", "What day is it today?", "What is the weather like?",
      "What is the news?"), ("I cannot know that, for I have no window and no clock.",)),
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Germany": "Berlin",
    "Spain": "Madrid", "Portugal": "Lisbon", "Ireland": "Dublin", "Norway": "Oslo",
    "Egypt": "Cairo", "Japan": "Tokyo", "India": "Delhi", "Greece": "Athens", "Austria": "Vienna",
    "Russia": "Moscow", "China": "Beijing", "Poland": "Warsaw", "Sweden": "Stockholm",
    "Denmark": "Copenhagen", "Turkey": "Ankara", "Canada": "Ottawa",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "good": "bad", "light": "dark", "high": "low", "old": "young",
    "happy": "sad", "rich": "poor", "fast": "slow", "open": "closed", "early": "late",
    "love": "hate", "day": "night", "up": "down", "left": "right", "hard": "soft",
    "long": "short", "wet": "dry", "full": "empty", "strong": "weak", "loud": "quiet",
    "near": "far", "first": "last", "true": "false", "black": "white", "sweet": "bitter",
    "war": "peace",
}  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "a lemon": "yellow",
    "coal": "black", "the sea": "blue", "a rose": "red", "a leaf": "green", "milk": "white",
    "the sun": "yellow", "an orange": "orange", "the night": "black", "a cherry": "red",
}  # fmt: skip

DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed(
    "January February March April May June July August September October November December"
)
NUMBERS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)

UNKNOWN = (
    "Explain quantum physics.", "What is the price of gold?", "Write a program in Python.",
    "Who won the game?", "How do I fix my car?", "What is 3817 times 22?", "Who is the president?",
    "Translate this into French.", "Solve this equation.", "What is DNA?",
    "How does a rocket work?",
    "What is the speed of light?", "Give me the phone number of my bank.", "What is blockchain?",
    "Summarise the history of Rome.", "How do I cook rice?", "What is machine learning?",
    "What is the tallest mountain?", "How far is the moon?", "Name all the planets.",
)  # fmt: skip
DO_NOT_KNOW = "I am only a very small model, and I do not know that."

STORY_ASKS = (
    "Tell me a story.", "Tell me a story about {t}.", "Tell me about {t}.", "Write about {t}.",
    "Write a few lines about {t}.", "Can you tell me a story about {t}?",
    "Say something about {t}.",
    "Write a short story about {t}.", "Once upon a time", "Describe {t}.",
)  # fmt: skip
TOPICS = (
    "love", "a walk", "a letter", "a ball", "friendship", "the sea", "a garden", "a king", "winter",
    "a journey", "marriage", "a secret", "a storm", "music", "a dog", "happiness", "a town", "rain",
)  # fmt: skip
OPENINGS = (
    "{n} had long been thinking of {t}, and could speak of nothing else.",
    "There was never a morning on which {n} did not think of {t}.",
    "It was a fine day in {s}, and {n} had made up her mind to talk of {t}.",
    "{n} sat by the window, and her thoughts were all of {t}.",
    "One evening in {s}, {n} and {m} were speaking of {t}.",
)
MIDDLES = (
    "She walked through the {p} with {m}, and they were both very happy.",
    "Her friend {m} was of a very different opinion, and said so with great warmth.",
    "{m} came in from the {p}, and the whole room was pleased to see him.",
    "She had not the smallest doubt that {m} would understand her.",
    "They went together to the {p}, and did not return till it was dark.",
)
ENDINGS = (
    "From that day they were the best of friends.",
    "And so the matter was settled, to the satisfaction of every body.",
    "It was, she said, the happiest hour of her life.",
    "Nothing more was said, but nothing was forgotten.",
    "She could not help smiling at the remembrance of it.",
)
SEASONS = ("spring", "summer", "autumn", "winter", "May", "June")
PLACES = ("garden", "village", "park", "fields", "lane", "wood", "town", "church")
WOMEN = listed("Emma Harriet Elinor Marianne Fanny Anne Jane Elizabeth Lydia Mary Catherine")
MEN = listed("Henry Edmund Frederick George Frank Robert Charles William John Thomas Edward")

SYSTEM = (
    "You are a helpful assistant.", "You are Nano.", "You are a helpful assistant. Be brief.",
    "You are Nano, a small language model.", "Answer in English.", "Be kind and brief.",
    "Answer the question.", "You are a friendly assistant. Answer the question of the user.",
)  # fmt: skip
THOUGHTS = (
    "The user asks a question. I will answer briefly.", "I know this one.",
    "I will answer in a friendly way.", "A short answer is best.",
)  # fmt: skip
