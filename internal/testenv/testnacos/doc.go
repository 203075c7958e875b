// Package testnacos runs Nacos servers for tests.
//
// The servers come from Maven Central, by the poms in tools/nacos-3.1.0 and
// tools/nacos-2.1.1 (a minute, 200 MB). Start runs one of a node, ready in 13
// to 18 seconds with a gigabyte of memory; StartCluster runs several of 3.x.
package testnacos
