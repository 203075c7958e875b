// Package e2e shows the main path with real programs: a change in Consul
// reaches a proxy behind istiod.
//
// Nothing in it is faked but the workloads: a Consul server, `isthmus serve`
// with its plugin process, istiod at the versions of testenv.IstiodVersions,
// and proxies behind it.
package e2e
