// Package testeureka runs Eureka servers for tests.
//
// The server is Spring Cloud's, from the pom in tools/eureka (Maven, ten
// seconds once the packages are there, 55 MB). Start runs one, which takes nine
// seconds; StartPair runs two that replicate.
package testeureka
