"""The text that studies read: English prose, written for this purpose."""

TEXT = """\
The river rises in the hills north of the town and runs for about sixty miles before it reaches
the sea. For most of the year it is slow and brown, and children fish from the old stone bridge on
warm evenings. In spring, when the snow melts, the water comes over the meadows and the road to
the mill is closed for a week or two. Nobody minds very much, because the soil that the flood
leaves behind is the reason why the gardens of the valley grow so well.

A clock measures time by counting something that repeats. A pendulum swings, a crystal vibrates,
an atom changes its state, and a device counts how often this has happened. The smaller the
difference between one repetition and the next, the better the clock. The first accurate clocks at
sea allowed sailors to find out how far east or west they were, since the sun stands highest at a
different moment in every place. A ship that knew the time at home and could see the sun at noon
knew where it was.

To bake a simple loaf of bread, mix five hundred grams of flour with ten grams of salt, a little
yeast and about three hundred and fifty grams of warm water. Knead the dough until it is smooth,
cover it with a cloth, and let it rest in a warm place until it has doubled in size. Shape it into
a ball, let it rise again for half an hour, and bake it in a hot oven for about forty minutes. The
bread is done when it sounds hollow if you knock on the bottom.

When two people disagree about a fact, they can look it up. When they disagree about what is fair,
there is nothing to look up, and yet they usually go on talking as if there were. One of them says
that everyone should get the same, the other that those who work more should get more, and both
believe that the matter is obvious. It often helps to ask what each of them would say if they did
not know which of the people concerned they were going to be.

Anna has 14 apples and gives 5 of them to her brother, so she has 9 left. Her brother had 3 before
and now has 8. Together they still have 17, because nothing was eaten. If each of them buys 6 more,
Anna has 15 and her brother has 14, which makes 29. A sum like this can be checked in two ways: add
what each of them has at the end, or begin with the 17 of both and add the 12 that they bought.

A library keeps its books in an order that a stranger can follow. Each has a number on its back,
and books about the same thing stand beside each other, so that whoever looks for one finds others
that they did not know of. In large libraries most of the books are below the ground, and a reader
waits an hour until one is brought up. What is lost in this way is chance: nobody walks past them.

Bees that have found flowers tell the others where these are. In the dark of the hive one of them
runs in a straight line, turns, and runs the line again. Its angle to the vertical is the angle of
the flowers to the sun, and the longer the run, the farther away they are. Those who follow the
dancer with their feelers fly out and search in the right field, though not always at the right
bush. On cloudy days they see the sun by the light of a small piece of blue sky.
"""
