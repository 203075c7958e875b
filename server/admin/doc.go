// Package admin shows the state of the bridge over HTTP.
//
// Everything is read-only but the two decisions at the end:
//
//	/                      pages for people: this one is an overview
//	/registries /services /host/NAME /sinks /changes /problems
//	/changes/stream        server-sent events: rows of /changes
//	/healthz               200 as long as the process answers
//	/readyz                200 once every registry has listed what it holds; 503 with the reasons otherwise, one per line
//	/metrics               Prometheus
//	/debug/pprof/          only if enabled
//	/api/v1/registries     JSON; so are the following
//	/api/v1/services       ?registry= ?q= ?limit= ?after=
//	/api/v1/resources      ?registry= ?collection= ?q= ?limit= ?after= ?body=true ?profile=
//	/api/v1/sinks
//	/api/v1/changes        ?registry= ?collection= ?q= ?limit= ?after=, newest first
//	/api/v1/explain        ?host=: from the registries to the sinks
//	/api/v1/conditions     what is wrong now
//	/api/v1/removals       ?registry= ?collection= ?q= ?limit= ?after=
//
//	POST /api/v1/registries/NAME/removals/allow
//	POST /api/v1/registries/NAME/removals/keep
//
// There is no access control: the address is loopback unless configured, and
// nothing shown is a secret. A web page of another origin cannot make a browser
// decide.
package admin
