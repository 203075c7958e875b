// Package etcd measures how late a change in etcd is at a sink.
package etcd
