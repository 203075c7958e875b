// Package stream runs the streams of sinks.
//
// A protocol implements a [Session] per stream: a state machine that handles
// requests and returns messages. It has no goroutine, and time is an argument.
// [Server.Serve] is the loop that runs it: it reads requests, waits for
// changes, and sends one message at a time. A sink that does not read blocks
// the loop of its own stream and no other.
//
// A [Server] has the register of all open streams, of all listeners and
// protocols: an [Entry] for each. What admits a stream, bounds it or ends it
// goes by its entry.
//
// A [Base] is what sessions of all protocols have in common: the order in which
// they serve collections, their profile, status and end. A protocol adds how
// requests are decoded, what they mean, and the header of responses.
//
// A [Subscription] is one collection of a stream in any protocol: what the sink
// lacks of it, from package view, with pacing, metrics, log records and status.
package stream
