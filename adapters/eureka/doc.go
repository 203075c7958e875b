// Package eureka is the adapter that follows a Netflix Eureka registry.
//
// # How it watches
//
// Eureka is polled. The first request is for everything (/apps), later ones for
// the changes of the last minutes (/apps/delta), an answer that is small if
// nothing has changed. A delta carries a hash code, the number of instances by
// status. Everything is requested again if the known instances do not have that
// hash code, after a pause longer than servers retain changes, after a change
// of server, and periodically, as the code does not cover all fields.
//
// # What is believed
//
// The rules are those of plugin.Poll. An error, an invalid answer, an empty
// listing or a listing that does not match its own hash code removes nothing.
// Instances missing after an outage, a large loss or a change of server are
// retained for remove_grace, since Eureka stores nothing on disk and learns its
// instances again from its clients.
package eureka
