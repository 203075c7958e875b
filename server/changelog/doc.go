// Package changelog lists names in the order of their last change.
//
// A [Log] has each name once; a change moves the name to the end. So what
// follows a revision is what changed since, each name with its newest entry:
//
//	revision   3   4   5   6   7   8
//	before     a   b   c   d              b changes, c is removed:
//	after      a       .   d   b   c†     slots 4 and 5 are empty
//
// A reader has a [Cursor] and calls [Log.Follow]. Nothing is queued per reader:
// one that comes late finds fewer, newer changes. A removed name retains its
// place, so that a removal is read like any other change. [Log.Evict] bounds
// the number of removals, oldest first; a reader that has not read an evicted
// one learns so from [Cursor.Lost], and starts over with the zero Cursor.
//
// The log has no index of names. Its owner keeps the revision at which each
// name is listed, which is the place that the methods ask for, and holds a lock
// while it calls any of them but Follow.
package changelog
