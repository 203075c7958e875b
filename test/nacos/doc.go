// Package nacos shows Nacos with real programs: a change in it reaches a
// client's calls by way of istiod.
package nacos
