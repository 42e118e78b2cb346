"""Pictures of runs, made of the files that a run leaves: pages without a server, and the terminal.

Knows no Ray and no model. The one idea: a page is one file that asks nothing of anybody; what comes from models and
files goes into it as data, and its script shows data as text.
"""
