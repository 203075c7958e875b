// Package stream drives the streams of sinks.
//
// A protocol brings a [Session] for each stream: a state machine that takes
// requests and yields messages, with time as an argument and without a
// goroutine. [Server.Serve] is the one loop that runs it: it reads requests,
// waits for changes, and sends one message after the other. While a sink does
// not read, the loop of its own stream waits and no other does.
//
// A [Subscription] adds to that of package view what both protocols need for
// each collection: pacing, metrics, log lines and status.
package stream
