"""Pictures of plans and of what they cost, and the pages that show them.

One design (`style`) for all: `timeline`, `tradeoff`, `layers` and `graph` each draw one picture from plain data;
`curves` and `by_layer` have their numbers; `page` puts everything into HTML. Drawing needs
matplotlib (`remat[plot]`), which is imported when something is drawn.
"""
