// Package verify judges what a sink received against what it may rely on.
//
// A recording is a sequence of [Event] values, one JSON object per line: what
// a sink sent and received, and what a registry had. `isthmus watch --record`
// writes the sink's part; whoever changes the registry writes the other part,
// the truth. A [Judge] reads the events in the order of time and returns a
// [Violation] for each broken guarantee of docs/guarantees.md, which has their
// numbers.
//
// The package shares no code with the server, so that a defect of one does not
// hide in the other.
package verify
