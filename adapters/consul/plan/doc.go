// Package plan schedules queries of services over connections that carry one
// query at a time.
//
// A Plan is a state machine: it has no goroutine, lock or clock, and starts
// nothing. Its caller reports what happened and when, performs what Step
// returns, and calls Step again at the time that it names. All of this affects
// only how soon a change is found: every service is requested in full when due,
// whatever was answered before.
//
// # A service
//
//	     Join
//	      |                     Rest: an answer
//	      v            +----------------------------+
//	  +--------+       v       DecideHold           |
//	  | asked  |--> +------+ ----------------> +---------+
//	  | in full|    | rest |                   | holds a |
//	  +--------+ <- +------+                   |  place  |
//	      ^   DecideAsk |                      +---------+
//	      |             | Woke, sweep                |
//	      |             v                            |
//	      |         +--------+                       |
//	      +---------| looked |   Keep is false:      |
//	index differs   |   at   |   back to rest <------+
//	                +--------+
//
// A service holds a place while there are at most as many services as places.
// Otherwise each place is that of a group, and its members rest.
//
// # A group
//
//	 divide          Keep: a place is free            Woke: a check has changed
//	--------> waits ----------------------> runs ---------------------------> its
//	            ^                             |                          members are
//	            +-----------------------------+                          looked at
//	              Keep: refused, or retired by the next divide
//
// A group waits on the checks of a name that no service has but that would sort
// among its members: Consul wakes such a query when a check of a service with
// their common prefix changes. A look at a member queries its index; if that
// differs, the member is requested in full.
//
// # A sweep
//
//	          Stir: the services' table has changed
//	          Doubt: only checks have
//	+------+ --------------------------------------> +-----------+
//	| idle |                                         | requested |
//	+------+ <---------------+                       +-----------+
//	    ^    all looked at   |                             | its time has come:
//	    |                +----------+                      | at once for an unknown
//	    |                | sweeping | <--------------------+ change, later where the
//	    |                +----------+                        changed service is known
//	    |                     | all looked at, and something was found
//	    |                     v
//	    |                 requested again
//
// Sweeps find changes without a change of a check. They look at all nodes if
// these are few, or at all services that rest.
package plan
