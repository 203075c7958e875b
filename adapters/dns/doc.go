// Package dns is the adapter that follows names in the DNS.
//
// # How it watches
//
// The DNS tells nobody of changes, so each name is asked for again when its
// records expire, within bounds (min_ttl, max_ttl). A question, a name with a
// type of record, is asked once however many services need it; the targets of
// SRV records are questions of their own, unless the answer carries their
// addresses. Run owns all state in one goroutine; a bounded number of others
// each asks one question of the servers.
//
// # What is believed
//
// Records are believed at once. That a name does not exist (NXDOMAIN) or has no
// record (NODATA) is believed if the answer carries the SOA record of the zone
// that says so, and if every answer has said so for remove_grace. Everything
// else is no answer: an error code, silence, a truncated, malformed or foreign
// message, an empty one without SOA. It removes nothing.
package dns
