// Package testzookeeper runs ZooKeeper servers for tests.
//
// The newest comes from Maven Central by the pom in tools/zookeeper (seconds),
// 3.4 by that in tools/zookeeper-3.4. Start runs one, which answers in half a
// second; StartEnsemble runs three.
package testzookeeper
