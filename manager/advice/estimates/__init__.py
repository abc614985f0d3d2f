"""What a recipe that was never measured will cost, from similar ones that were (SchedMate §3.1).

vectors.py     facts and normalised source as a vector: hashing TF-IDF, numbers as bumps on a scale of octaves
history.py     the facts of recipes and functions in one SQLite file; what they cost is in `contexts.performance`
retrieval.py   the most similar recipes, by cosine, over a threshold
scaling.py     what a quantity does where a number differs: twice the steps, twice the time
blending.py    several recipes' measurements as one distribution
estimator.py   all of these together: `Estimator.estimate`
"""
