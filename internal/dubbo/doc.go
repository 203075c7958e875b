// Package dubbo reads what Dubbo writes to registries, in the words of package
// registry.
//
// ZooKeeper and Nacos hold the same in different forms: URLs as names of nodes
// there, metadata of instances here. Both become a [Provider], so that a
// service is the same whichever registry has it. All functions are pure, and no
// input makes them panic.
package dubbo
